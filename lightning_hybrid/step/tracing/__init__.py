"""The function mode that intercepts each operation of a step, shared by recording and replay."""
