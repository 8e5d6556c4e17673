"""Planning: schedules, balance, simulation and pictures, without torch.

Imports in milliseconds and plans a pipeline of a thousand ranks on a laptop.
"""
