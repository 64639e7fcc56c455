from . import Command

COMMAND = Command("compare", "", "", "", lambda p: None, lambda c: 0)
