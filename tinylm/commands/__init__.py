"""One file per subcommand: options -> config -> one library call -> print."""
