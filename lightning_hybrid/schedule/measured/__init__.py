"""What measured steps say: lost time by cause, seconds of stages, better cuts, and the file that keeps the costs."""
