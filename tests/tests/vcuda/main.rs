//! Tests guests whose programs use CUDA through the stock driver of virtio-gpu.

mod device;
mod programs;
