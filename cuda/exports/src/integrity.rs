//! Computes the result of the runtime's integrity query about the driver: a keyed hash (RFC 2104) with MD2 (RFC 1319)
//! of properties of the process and the devices. [Decision 143](../../../docs/decisions/143-integrity-answer.md) gives
//! the reasons.
//!
//! UNSAFETY: calls libc to get the thread's identity.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use hmac::digest::KeyInit;
use hmac::{Mac, SimpleHmac};
use md2::Md2;

use crate::result::INVALID_VALUE;
use crate::{Device, driver};

/// Key of the hash.
const KEY: [u8; 16] = 0x146A_DDAE_53A9_A752_AA08_4136_0BF5_5A9F_u128.to_be_bytes();
/// First word of the result for versions that end in 0.
const FIRST_OF_0: u64 = 0x3341_181C_03CB_675C;
/// First word of the result for versions that end in 1.
const FIRST_OF_1: u64 = 0x1841_181C_03CB_675C;
/// Second word of both results.
const SECOND: u64 = 0x8ED3_83AA_1F4C_D1E8;

/// Addresses included in the hash.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Address of the runtime's table.
    pub runtime_table: u64,
    /// Address of the integrity table.
    pub own_table: u64,
    /// Address of the function in slot 1 of the integrity table.
    pub function: u64,
}

/// Properties of the process, in the order in which they are hashed.
#[derive(Clone, Copy, Debug)]
struct Process {
    driver_version: u32,
    process: u32,
    /// Low half of `pthread_self()`.
    thread: u32,
    addresses: Addresses,
}

/// Returns this process's result for `version` and the time `seconds`.
pub fn answer(version: u32, seconds: u64, addresses: Addresses) -> Result<[u8; 16], i32> {
    let driver = driver()?;
    driver.ready()?;
    // SAFETY: the call has no preconditions.
    let thread = unsafe { libc::pthread_self() };
    let process =
        Process { driver_version: driver.version(), process: std::process::id(), thread: thread as u32, addresses };
    match version % 10 {
        0 => Ok(words(FIRST_OF_0)),
        1 => Ok(words(FIRST_OF_1)),
        2 => Ok(hash(version, seconds, &process, &driver.devices())),
        _ => Err(INVALID_VALUE),
    }
}

/// Returns a result that is the same in all processes.
fn words(first: u64) -> [u8; 16] {
    (u128::from(SECOND) << 64 | u128::from(first)).to_le_bytes()
}

/// Computes the result, which depends on the process, the time and the devices.
fn hash(version: u32, seconds: u64, process: &Process, devices: &[Device]) -> [u8; 16] {
    // The type guarantees a key of one block.
    let mut mac = <SimpleHmac<Md2> as KeyInit>::new(&KEY.into());
    for half in [process.driver_version, version, process.process, process.thread] {
        mac.update(&half.to_le_bytes());
    }
    let Addresses { runtime_table, own_table, function } = process.addresses;
    for word in [runtime_table, own_table, function, seconds] {
        mac.update(&word.to_le_bytes());
    }
    for device in devices {
        mac.update(&device.uuid);
        for part in [device.domain, device.bus, device.device] {
            mac.update(&part.to_le_bytes());
        }
    }
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use md2::Digest;

    use super::*;

    const PROCESS: Process =
        Process { driver_version: 13_000, process: 4711, thread: 0x89AB_CDEF, addresses: ADDRESSES };
    const ADDRESSES: Addresses =
        Addresses { runtime_table: 0x7F00_0000_1000, own_table: 0x7F00_0000_2000, function: 0x7F00_0000_3000 };

    fn hex(bytes: impl AsRef<[u8]>) -> String {
        bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn digest_of_rfc_texts_is_the_rfcs() {
        for (text, digest) in [
            ("", "8350e5a3e24c153df2275c9f80692773"),
            ("a", "32ec01ec4a6dac72c0ab96fb34c0b5d1"),
            ("abc", "da853b0d3f88d99b30283a69e6ded6bb"),
            ("message digest", "ab4f496bfb2a530b219ff33031fe06b0"),
            ("abcdefghijklmnopqrstuvwxyz", "4e8ddff3650292ab5a4108c3aa47940b"),
        ] {
            assert_eq!(hex(Md2::digest(text)), digest, "{text:?}");
        }
    }

    /// Compares the hash with a step-by-step computation as in RFC 2104, on input assembled by the test.
    #[test]
    fn answer_is_the_keyed_hash_of_the_facts() {
        let device = Device { uuid: *b"sixteen letters.", domain: 1, bus: 0x41, device: -1 };
        let mut message = Vec::new();
        message.extend([0xC8, 0x32, 0, 0, 0xFA, 0x32, 0, 0, 0x67, 0x12, 0, 0, 0xEF, 0xCD, 0xAB, 0x89]);
        message.extend([0, 0x10, 0, 0, 0, 0x7F, 0, 0, 0, 0x20, 0, 0, 0, 0x7F, 0, 0]);
        message.extend([0, 0x30, 0, 0, 0, 0x7F, 0, 0, 0xD2, 0x02, 0x96, 0x49, 0, 0, 0, 0]);
        message.extend(b"sixteen letters.");
        message.extend([1, 0, 0, 0, 0x41, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]);
        let key = [20, 106, 221, 174, 83, 169, 167, 82, 170, 8, 65, 54, 11, 245, 90, 159];
        let inner = Md2::new().chain_update(key.map(|byte: u8| byte ^ 0x36)).chain_update(&message).finalize();
        let outer = Md2::new().chain_update(key.map(|byte: u8| byte ^ 0x5C)).chain_update(inner).finalize();
        assert_eq!(hex(hash(13_050, 1_234_567_890, &PROCESS, &[device])), hex(outer));
    }

    #[test]
    fn each_fact_changes_the_answer() {
        let device = Device { uuid: [1; 16], domain: 2, bus: 3, device: 4 };
        let answers = [
            hash(13_052, 5, &PROCESS, &[device]),
            hash(12_092, 5, &PROCESS, &[device]),
            hash(13_052, 6, &PROCESS, &[device]),
            hash(13_052, 5, &Process { driver_version: 12_090, ..PROCESS }, &[device]),
            hash(13_052, 5, &Process { process: 1, ..PROCESS }, &[device]),
            hash(13_052, 5, &Process { thread: 1, ..PROCESS }, &[device]),
            hash(13_052, 5, &Process { addresses: Addresses { runtime_table: 1, ..ADDRESSES }, ..PROCESS }, &[device]),
            hash(13_052, 5, &Process { addresses: Addresses { own_table: 1, ..ADDRESSES }, ..PROCESS }, &[device]),
            hash(13_052, 5, &Process { addresses: Addresses { function: 1, ..ADDRESSES }, ..PROCESS }, &[device]),
            hash(13_052, 5, &PROCESS, &[Device { bus: 4, ..device }]),
            hash(13_052, 5, &PROCESS, &[device, device]),
            hash(13_052, 5, &PROCESS, &[]),
        ];
        let distinct: std::collections::BTreeSet<_> = answers.iter().collect();
        assert_eq!(distinct.len(), answers.len());
    }

    #[test]
    fn answers_to_the_first_two_versions_are_constant() {
        assert_eq!(hex(words(FIRST_OF_0)), "5c67cb031c184133e8d14c1faa83d38e");
        assert_eq!(hex(words(FIRST_OF_1)), "5c67cb031c184118e8d14c1faa83d38e");
    }
}
