//! Creates a QEMU with a patched emulation of AMD SVM. With it, virtual machines can run concurrently even if each
//! emulated CPU has its own thread.
//!
//! VMRUN can inject an interrupt into a guest. QEMU (up to at least version 11.1.3) records the vector as a pending
//! exception and delivers it, but does not clear the record. If the CPU's thread leaves its loop before the guest's
//! next exit or exception, for a reason other than an interrupt, QEMU mistakes the record for a new exception. QEMU
//! then delivers the interrupt a second time, at an arbitrary point. Between `swapgs` and `iretq`, this causes a triple
//! fault. With a single CPU and thread, this is very rare.
//!
//! This module creates a copy of QEMU without the instruction that records the vector. It finds the instruction by its
//! effect, not by its address: only one call delivers the interrupt, and only one instruction stores the value that
//! becomes the call's second argument. If the search fails, no copy is created.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use object::{Object, ObjectSection, ObjectSymbol};

use crate::cache::{Cache, hash_file, key};
use crate::progress::Progress;
use crate::qemu::{self, Qemu};

/// Kind of the item in the cache.
const KIND: &str = "svm";
/// Version of the recipe. It must be incremented when the patch changes.
const VERSION: &str = "1";
/// Name of the function that emulates VMRUN.
const RUN: &str = "helper_vmrun";
/// Name of the function that `RUN` calls to deliver an interrupt.
const DELIVER: &str = "do_interrupt_x86_hardirq";
/// Number of bytes before the call in which to search for the store.
const SEARCHED_BYTES: usize = 96;
/// Opcode of a store of a 32-bit register.
const STORE: u8 = 0x89;
/// ModRM byte of a store of ESI (a function's second argument) with a 32-bit displacement, excluding the base register.
const FROM_ESI: u8 = 0b10_110_000;
/// Mask of the base register in a ModRM byte.
const BASE: u8 = 0b111;
/// Value of the base register field if a SIB byte follows.
const BASE_IN_SIB: u8 = 0b100;
/// Length of the store instruction in bytes.
const STORE_BYTES: usize = 6;
/// A no-op instruction of the same length.
const NOP: [u8; STORE_BYTES] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];
/// Opcode of a relative call.
const CALL: u8 = 0xe8;
/// Length of the call instruction in bytes.
const CALL_BYTES: usize = 5;

/// Finds or creates the patched copy. Returns `None` if the instruction cannot be found in QEMU.
pub(crate) fn ensure(qemu: &Qemu, cache: &Cache, progress: &Progress) -> Result<Option<Qemu>> {
    let original = qemu::binary(qemu)?;
    let key = key(&[VERSION, &hash_file(&original)?]);
    let folder = match cache.find(KIND, &key) {
        Some(folder) => folder,
        None => {
            let image = fs::read(&original).with_context(|| format!("cannot read {}", original.display()))?;
            let Some(image) = mended(image) else {
                progress.line("images: this QEMU's emulation of SVM is unknown: machines with VMs get one processor");
                return Ok(None);
            };
            cache.make(KIND, &key, |folder| {
                let copy = folder.join(qemu::PROGRAM);
                fs::copy(&original, &copy).with_context(|| format!("cannot create {}", copy.display()))?;
                fs::write(&copy, image).with_context(|| format!("cannot write {}", copy.display()))
            })?
        }
    };
    cache.prune(KIND, &[&key])?;
    Ok(Some(instead(qemu, &original, &folder.join(qemu::PROGRAM))))
}

/// Returns `qemu` with `original` replaced by `copy`. By default, QEMU finds its firmware relative to its own path, so
/// options specify the original firmware folders.
fn instead(qemu: &Qemu, original: &Path, copy: &Path) -> Qemu {
    let mut mended = qemu.clone();
    let copied = copy.display().to_string();
    match mended.args.iter_mut().find(|arg| Path::new(arg.as_str()) == original) {
        Some(arg) => *arg = copied,
        None => {
            mended.program = copy.to_owned();
            let folders = crate::exec::probe(qemu.command().args(["-L", "help"])).unwrap_or_default();
            mended.args.extend(folders.lines().flat_map(|folder| ["-L".to_owned(), folder.to_owned()]));
        }
    }
    mended
}

/// Replaces the instruction with a no-op. Returns `None` if the instruction is not found.
fn mended(mut image: Vec<u8>) -> Option<Vec<u8>> {
    let at = place(&image)?;
    image.get_mut(at..at + STORE_BYTES)?.copy_from_slice(&NOP);
    Some(image)
}

/// Returns the offset of the instruction in the file.
fn place(image: &[u8]) -> Option<usize> {
    let file = object::File::parse(image).ok()?;
    let symbol = |name: &str| file.dynamic_symbols().find(|symbol| symbol.name() == Ok(name));
    let (run, deliver) = (symbol(RUN)?, symbol(DELIVER)?);
    let section = file.section_by_index(run.section_index()?).ok()?;
    let code = section.data_range(run.address(), run.size()).ok()??;
    let (start, _) = section.file_range()?;
    let offset = start + run.address().checked_sub(section.address())?;
    Some(usize::try_from(offset).ok()? + store(code, run.address(), deliver.address())?)
}

/// Returns the offset in `code` of the only store of ESI before the only call of `deliver`. `address` is the address of
/// `code`.
fn store(code: &[u8], address: u64, deliver: u64) -> Option<usize> {
    let calls = code.windows(CALL_BYTES).enumerate().filter(|(at, window)| {
        let [CALL, far @ ..] = window else { return false };
        let far = far.try_into().map(i32::from_le_bytes).unwrap_or_default();
        let end = address.wrapping_add((at + CALL_BYTES) as u64);
        end.wrapping_add_signed(far.into()) == deliver
    });
    let call = only(calls.map(|(at, _)| at))?;
    let first = call.saturating_sub(SEARCHED_BYTES);
    let stores = code.get(first..call)?.windows(STORE_BYTES).enumerate().filter(|(_, window)| {
        let [STORE, form, ..] = window else { return false };
        form & !BASE == FROM_ESI && form & BASE != BASE_IN_SIB
    });
    only(stores.map(|(at, _)| first + at))
}

fn only<T>(mut of: impl Iterator<Item = T>) -> Option<T> {
    let one = of.next()?;
    of.next().is_none().then_some(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store of ESI.
    const STORES: [u8; STORE_BYTES] = [0x89, 0xb3, 0x50, 0xc2, 0xff, 0xff];
    /// Code that calls an address 0x100 bytes after the call.
    const CALLS: [u8; CALL_BYTES] = [0xe8, 0x00, 0x01, 0x00, 0x00];

    /// Returns the concatenated parts as code at address 0x1000, and the target of the last call.
    fn code(parts: &[&[u8]]) -> (Vec<u8>, u64) {
        let code = parts.concat();
        let called = 0x1000 + code.len() as u64 + 0x100;
        (code, called)
    }

    #[test]
    fn store_before_the_call_is_found() {
        let (code, called) = code(&[&[0x90; 200], &STORES, &[0x90; 30], &CALLS]);
        assert_eq!(store(&code, 0x1000, called), Some(200));
        assert_eq!(store(&code, 0x1000, called + 1), None, "nothing calls that");
    }

    #[test]
    fn ambiguous_code_is_not_patched() {
        let none = code(&[&[0x90; 200], &CALLS]);
        let far = code(&[&STORES, &[0x90; SEARCHED_BYTES], &CALLS]);
        let two = code(&[&STORES, &[0x90; 10], &STORES, &CALLS]);
        // Test a store of EDI, and a store to an indexed address.
        let other = code(&[&[0x89, 0xbb, 0x50, 0xc2, 0xff, 0xff], &[0x89, 0xb4, 0x03, 0, 0, 0, 0], &CALLS]);
        for (code, called) in [none, far, two, other] {
            assert_eq!(store(&code, 0x1000, called), None);
        }
        let mut twice = [&STORES[..], &CALLS].concat();
        let called = 0x1000 + twice.len() as u64 + 0x100;
        twice.extend([0xe8, 0xfb, 0x00, 0x00, 0x00]);
        assert_eq!(store(&twice, 0x1000, called), None, "two calls");
        assert_eq!(mended(b"no program".to_vec()), None);
    }

    #[test]
    fn copied_program_replaces_original_in_arguments() {
        let qemu = Qemu {
            program: "/lib/ld.so".into(),
            args: vec!["--library-path".into(), "/q/lib".into(), "/q/bin/qemu".into(), "-L".into(), "/q/share".into()],
            env: Vec::new(),
            version: "11.1.3".into(),
        };
        let copy = instead(&qemu, Path::new("/q/bin/qemu"), Path::new("/c/qemu"));
        assert_eq!((copy.args[2].as_str(), copy.args.len()), ("/c/qemu", 5));
        assert_eq!(copy.program, qemu.program);
    }
}
