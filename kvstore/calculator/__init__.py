"""The sums of `kvstore break-even`: numbers in, numbers out; the command line lies in kvstore/cli."""
