"""Tools for click logs.

synth    generates logs from a known model
teacher  that model: rows in the shape of Criteo's, clicks and purchases
interests  another one: visits of a shop, whose clicks depend on past events
fetch    downloads public logs
prepare  splits a log into training and test parts and fits transforms
stats    describes the columns of a log
convert  rewrites a log in another format
source   reads logs block by block
target   encodes rows and writes output files
sketch   column statistics in bounded memory
"""
