"""Puts a plan's weights into GPU memory."""
