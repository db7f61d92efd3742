"""Dependencies of a recorded trace: the state that guards compare, and reads and branches that no guard covers."""
