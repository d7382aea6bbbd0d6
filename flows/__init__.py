"""What happens, in order: each flow reads as a story. The command line on top of them is in `flows.cli`."""
