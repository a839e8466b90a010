"""Jobs: folders that can be gone on with, parts, preemption, figures over time, and the files that results go to."""
