"""What ``gpu_check.py`` checks: tables of small functions, one module a kind."""
