"""Which experts a pruned model keeps: routing statistics, the choice, the file that names them."""
