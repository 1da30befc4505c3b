"""The paper: its numbers, the runs behind its tables and figures, and both side by side."""
