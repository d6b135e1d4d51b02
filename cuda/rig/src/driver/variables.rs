//! Modules with variables, from PTX and from containers with compressed entries.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_char, c_int, c_void};

use super::{Cuda, Failed, check};

/// PTX with the variable that the kernels `tally` and `locate` use, and another variable.
const TEXT: &str = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .global .align 8 .u64 tally;\n\
    .global .align 4 .b8 other[64];\n.visible .entry tally() { ret; }\n";

/// Compression of a container entry.
#[derive(Clone, Copy, Debug)]
enum Packing {
    Lz4,
    Zstandard,
    /// Flagged as compressed, but contains invalid data.
    Broken,
}

/// Returns a container with one PTX entry.
fn container(text: &str, packing: Packing) -> Vec<u8> {
    let text = text.as_bytes();
    let (flags, packed) = match packing {
        // An LZ4 block of literals only: the length is 15, plus the rest in bytes of at most 255.
        Packing::Lz4 => {
            let rest = text.len() - 15;
            let lengths = std::iter::repeat_n(255, rest / 255).chain([(rest % 255) as u8]);
            (0x2000u64, [0xf0].into_iter().chain(lengths).chain(text.iter().copied()).collect())
        }
        // A Zstandard frame with a single segment, a four-byte content size, and one raw block.
        Packing::Zstandard => {
            let mut bytes = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&((text.len() as u32) << 3 | 1).to_le_bytes()[..3]);
            bytes.extend(text);
            (0x8000, bytes)
        }
        Packing::Broken => (0x8000, vec![0; 64]),
    };
    let padded = packed.len().next_multiple_of(8);
    let mut header = vec![0u8; 64];
    header[0] = 1;
    header[4] = 64;
    header[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
    header[16..20].copy_from_slice(&(packed.len() as u32).to_le_bytes());
    header[28] = 90;
    header[40..48].copy_from_slice(&flags.to_le_bytes());
    header[56..64].copy_from_slice(&(text.len() as u64).to_le_bytes());
    let mut bytes = 0xba55_ed50_u32.to_le_bytes().to_vec();
    bytes.extend([1, 0, 16, 0]);
    bytes.extend((64 + padded as u64).to_le_bytes());
    bytes.extend(header);
    bytes.extend(&packed);
    bytes.resize(16 + 64 + padded, 0);
    bytes
}

/// Kernels that count their launches in variables of their modules.
#[derive(Debug)]
pub struct Counters {
    kernels: Vec<u64>,
    sums: Vec<u64>,
    /// Address of the memory for results.
    result: u64,
}

impl Cuda {
    /// Loads modules with counters: one from PTX, one from a container, and a library from a container.
    ///
    /// # Errors
    /// Returns an error if a call fails.
    pub fn counters(&self) -> Result<Counters, Failed> {
        type Options = *const c_void;
        let load_container = function!(self, c"cuModuleLoadFatBinary", 2000, fn(*mut u64, *const u8));
        let load_library = function!(
            self,
            c"cuLibraryLoadData",
            12_000,
            fn(*mut u64, *const u8, Options, Options, u32, Options, Options, u32)
        );
        let get_kernel = function!(self, c"cuLibraryGetKernel", 12_000, fn(*mut u64, u64, *const c_char));
        let text = self.module(TEXT)?;
        let (lz4, zstd) = (container(TEXT, Packing::Lz4), container(TEXT, Packing::Zstandard));
        let (mut module, mut library, mut kernel) = (0, 0, 0);
        let none = std::ptr::null();
        // SAFETY: the containers have the sizes in their headers, and the other pointers refer to local variables.
        unsafe {
            check("cuModuleLoadFatBinary", load_container(&raw mut module, lz4.as_ptr()))?;
            check("cuLibraryLoadData", load_library(&raw mut library, zstd.as_ptr(), none, none, 0, none, none, 0))?;
            check("cuLibraryGetKernel", get_kernel(&raw mut kernel, library, c"tally".as_ptr()))?;
        }
        let kernels = vec![self.kernel_of(text, "tally")?, self.kernel_of(module, "tally")?, kernel];
        let result = self.alloc(8)?;
        Ok(Counters { sums: vec![0; kernels.len()], kernels, result })
    }

    /// Returns a module's kernel.
    fn kernel_of(&self, module: u64, name: &str) -> Result<u64, Failed> {
        let name = std::ffi::CString::new(name).map_err(|_| Failed { call: "kernel", code: 1 })?;
        let mut function = 0;
        self.raw_function(&raw mut function, module, name.as_ptr()).map(|()| function)
    }

    /// Loads a module from [`TEXT`] with `extra` appended.
    pub(super) fn module_with(&self, extra: &str) -> Result<u64, Failed> {
        self.module(&format!("{TEXT}{extra}"))
    }

    /// Loads a module from a container that cannot be decompressed.
    pub(super) fn broken_module(&self) -> Result<u64, Failed> {
        let load_container = function!(self, c"cuModuleLoadFatBinary", 2000, fn(*mut u64, *const u8));
        let (mut module, broken) = (0, container(TEXT, Packing::Broken));
        // SAFETY: the container has the size in its header.
        check("cuModuleLoadFatBinary", unsafe { load_container(&raw mut module, broken.as_ptr()) })?;
        Ok(module)
    }

    /// Loads a module, queries the address of its variable, and uses the variable through this address.
    pub(super) fn addressed_module(&self) -> Result<u64, Failed> {
        let find = function!(self, c"cuModuleGetGlobal", 3020, fn(*mut u64, *mut usize, u64, *const c_char));
        let (module, mut address, mut bytes) = (self.module_with("")?, 0, 0);
        // SAFETY: the pointers refer to local variables.
        check("cuModuleGetGlobal", unsafe { find(&raw mut address, &raw mut bytes, module, c"tally".as_ptr()) })?;
        self.write(address, &[5])?;
        let result = self.alloc(8)?;
        self.launch(self.kernel_of(module, "tally")?, &[result], 0)?;
        let sum = self.read(result, 1)?[0];
        self.free(result)?;
        if (bytes, sum) == (8, 6) { Ok(module) } else { Err(Failed { call: "a variable by its address", code: -1 }) }
    }

    /// Makes a kernel write the address of its module's variable to the second word at `place`.
    pub(super) fn store_address(&self, place: u64) -> Result<(), Failed> {
        let module = self.module_with("")?;
        self.launch(self.kernel_of(module, "locate")?, &[place + 8], 0)?;
        if self.read(place + 8, 1)?[0] == 0 { Err(Failed { call: "locate", code: -1 }) } else { Ok(()) }
    }
}

impl Counters {
    /// Increments each counter by launching its kernel, and checks the sums.
    ///
    /// # Errors
    /// Returns an error if a call fails or a sum is wrong.
    pub fn round(&mut self, cuda: Cuda) -> Result<(), Failed> {
        for (kernel, sum) in self.kernels.iter().zip(&mut self.sums) {
            cuda.launch(*kernel, &[self.result], 0)?;
            *sum += 1;
            let found = cuda.read(self.result, 1)?[0];
            if found != *sum {
                eprintln!("a variable has {found} instead of {sum}");
                return Err(Failed { call: "the value of a variable", code: -1 });
            }
        }
        Ok(())
    }
}
