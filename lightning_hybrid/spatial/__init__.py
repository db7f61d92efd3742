"""Images, volumes and feature maps sharded along one axis of space: each rank convolves its own rows."""
