"""Communication of CPU ranks on one host through shared memory and Unix sockets; gloo only has network sockets."""
