//! Tests guests with programs that use CUDA through the stock virtio-gpu driver.

mod device;
mod programs;
