"""The functions that users call: what they take, what they return, and the fast path of a call like one before."""
