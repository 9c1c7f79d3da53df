"""The wire's messages (kvstore.proto) and what grpcio-tools generates from them (`make proto`)."""
