"""One file per subcommand: options -> config -> one library call -> print. The other files are shared by several."""
