"""The command line: one file per command, options made from the config models, main.py around them."""
