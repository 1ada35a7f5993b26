"""x"""
def add(v): pass
