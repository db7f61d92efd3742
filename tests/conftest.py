pytest_plugins = ["harness.worlds.worlds_plugin"]
