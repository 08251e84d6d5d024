"""`python -m genomoe` and `torchrun -m genomoe` run the command line."""

from genomoe.cli import main

if __name__ == "__main__":
    main()
