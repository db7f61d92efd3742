pytest_plugins = ["worlds_plugin"]
