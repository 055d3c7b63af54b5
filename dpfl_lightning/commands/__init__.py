"""The commands of `dpfl`, one file each."""
