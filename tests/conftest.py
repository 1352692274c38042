"""What every test folder shares; its presence puts ``tests/`` on the path, where the fakes and references lie."""
