"""`python -m dpfl_lightning.fit --config FILE`: the command `dpfl fit`."""

from dpfl_lightning.commands.fit import main

if __name__ == "__main__":
    raise SystemExit(main())
