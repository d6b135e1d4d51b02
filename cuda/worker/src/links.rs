//! Results of run-time linking. The driver keeps a result until the link is destroyed, and the guest reads it in parts.
//!
//! UNSAFETY: reads the result, whose address and size the driver returns.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use cuda_calls::own::{self, MAX_IMAGE_BYTES};
use cuda_calls::{Fault, Handles as _, Kind};
use cuda_ring::control;

use crate::driver::{NOT_SUPPORTED, Needed};
use crate::executor::{Broken, Executor};
use crate::pending::{Linked, Origin};

impl Executor {
    /// Completes a link, or replies with a part of its result.
    pub(crate) fn link(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        match (origin.header.op, words) {
            (own::LINK_COMPLETE, [handle]) => {
                let result = match self.objects.find(Kind::Link, *handle) {
                    Ok(link) => self.complete(*handle, link),
                    Err(Fault::Refused(code)) => Err(code),
                    Err(Fault::Malformed) => return Err(Broken::Malformed),
                };
                match result {
                    Ok(bytes) => self.finish(origin, 0, &[bytes]),
                    Err(code) => self.finish(origin, code, &[]),
                }
            }
            (own::LINK_READ, [handle, first]) if *handle == self.linked.handle && first.is_multiple_of(8) => {
                let first = usize::try_from(*first / 8).unwrap_or(usize::MAX);
                let rest = self.linked.words.get(first..).unwrap_or_default();
                let part = rest.get(..rest.len().min(control::AREA_BYTES as usize / 8)).unwrap_or_default().to_vec();
                self.finish(origin, 0, &part);
            }
            _ => return Err(Broken::Malformed),
        }
        Ok(())
    }

    /// Completes a link, and stores its result. Returns the size of the result in bytes.
    fn complete(&mut self, handle: u64, link: u64) -> Result<u64, i32> {
        let (mut address, mut bytes) = (0u64, 0u64);
        let places = [(&raw mut address).addr() as u64, (&raw mut bytes).addr() as u64];
        let [first, second] = places;
        match self.driver.invoke(Needed::LinkComplete, &[link, first, second]) {
            0 => {}
            code => return Err(code),
        }
        let count = usize::try_from(bytes).ok().filter(|count| *count <= MAX_IMAGE_BYTES).ok_or(NOT_SUPPORTED)?;
        let mut words = vec![0u64; count.div_ceil(8)];
        if address != 0 {
            // SAFETY: the driver returns a result of this size, which is valid as long as the link exists.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, words.as_mut_ptr().cast(), count) };
        }
        self.linked = Linked { handle, words };
        Ok(bytes)
    }
}
