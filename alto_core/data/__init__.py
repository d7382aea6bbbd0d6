"""From rows of a data set to token sequences with a label mask, split and packed. Knows no engine and no tracking."""
