from .. import cli
from .command import Options, main

if __name__ == "__main__":
    cli.run(main, Options, prog="hpc_oldsgd.theory")
