"""Launch target kubernetes."""
