"""Pull requests: a series as commits of the user's on a branch in a new work tree, checked, with the text for it.

Nothing here reaches a network: what is made stays in the user's checkout until the user sends it.
"""
