//! Names of devices.

use std::path::PathBuf;
use std::str::FromStr;

use crate::Error;

/// Path of the first render node.
const FIRST_NODE: &str = "/dev/dri/renderD128";

/// A device to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Path of a nouveau render node, in a guest or on a host.
    Nouveau(PathBuf),
    /// Socket of a vGPU that the operator has assigned to this process, which drives the vGPU itself.
    Vgpu(PathBuf),
    /// Number of a CUDA driver API device.
    Cuda(i32),
}

impl Target {
    /// Returns the machine's first device, which is the first CUDA device if `libcuda.so.1` reports one, or the first
    /// render node otherwise.
    #[must_use]
    pub fn first() -> Self {
        #[cfg(feature = "cuda")]
        if crate::cuda::device_count().is_ok_and(|count| count > 0) {
            return Self::Cuda(0);
        }
        Self::Nouveau(FIRST_NODE.into())
    }
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let unknown = || Error::Target(name.chars().take(64).collect());
        Ok(match name.split_once(':') {
            None if name == "nouveau" => Self::Nouveau(FIRST_NODE.into()),
            None if name == "cuda" => Self::Cuda(0),
            Some(("nouveau", path)) if path.starts_with('/') => Self::Nouveau(path.into()),
            Some(("vgpu", path)) if path.starts_with('/') => Self::Vgpu(path.into()),
            Some(("cuda", number)) => Self::Cuda(number.parse().ok().filter(|at| *at >= 0).ok_or_else(unknown)?),
            _ => return Err(unknown()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_and_others_refused() {
        assert_eq!("cuda".parse::<Target>().expect("valid"), Target::Cuda(0));
        assert_eq!("cuda:3".parse::<Target>().expect("valid"), Target::Cuda(3));
        assert_eq!("nouveau".parse::<Target>().expect("valid"), Target::Nouveau(FIRST_NODE.into()));
        assert_eq!(
            "nouveau:/dev/dri/renderD129".parse::<Target>().expect("valid"),
            Target::Nouveau("/dev/dri/renderD129".into())
        );
        assert_eq!("vgpu:/run/vm.sock".parse::<Target>().expect("valid"), Target::Vgpu("/run/vm.sock".into()));
        for wrong in [
            "",
            "vgpu",
            "vgpu:",
            "vgpu:vm.sock",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "nouveau:",
            "nouveau:renderD128",
            "opencl",
            "cuda:0:1",
        ] {
            assert!(matches!(wrong.parse::<Target>(), Err(Error::Target(_))), "{wrong}");
        }
    }
}
