"""The functions that users call: what they take, what they return, and the short way of a call like one before."""
