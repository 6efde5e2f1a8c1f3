"""The model families that can be upcycled, one module each; `interface` says how to add one."""
