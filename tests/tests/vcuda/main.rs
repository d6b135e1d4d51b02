//! Guests whose programs use CUDA: the stock driver of virtio-gpu with the device.

mod device;
