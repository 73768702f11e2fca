"""Static shapes (`buckets`), the batch as one buffer (`packing`) and the compiled steps (`steps`)."""
