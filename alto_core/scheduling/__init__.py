"""Who runs where and when, and what that takes and lasts. Pure functions over plain values."""
