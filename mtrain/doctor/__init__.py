"""Check that a run folder is complete, undamaged, and that its training resumes exactly.

Changes nothing in the folder.
"""
