"""word2vec: vectors of words from plain text, on the same table, reader and modes as everything else.

vocabulary.py  the words of a corpus and their counts
prepare.py     plain text -> sentences in part files, and the vocabulary
synth.py       text with planted topics and analogies
model.py       what a configuration may say, and the rows' initial values
step.py        one batch of sentences: pairs drawn afresh, rows in, gradients out; or rows trained in place
vectors.py     a trained model -> nearest words, analogies, the word2vec text format
"""
