"""Quality and speed of decoding settings side by side, on tasks with exact graders: `archer-evaluate`."""
