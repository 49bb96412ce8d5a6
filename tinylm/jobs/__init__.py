"""What a model can learn from: the protocol of a job, how data are read for it, and a folder with the code of each."""
