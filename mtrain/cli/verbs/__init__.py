"""The verbs, one file each: the options of each, and the calls that it makes.

They share the options, the console and the ranks of `mtrain.cli`, and import no other verb.
"""
