"""The life of a process: it is asked to stop, or it hangs.

What may come in: signals, time limits, heartbeats. Nothing here knows what is being trained. No torch.
"""
