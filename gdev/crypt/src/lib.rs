//! An encrypted block device: an NBD server that encrypts sectors with AES-256-XTS before it writes them to a file.
//!
//! The program is an example of a host service with its own card (figures 8 to 10 of the Gdev paper). The card encrypts
//! large requests if it is faster than the CPU. The CPU takes over if the card fails. A write is acknowledged once the
//! encrypted sectors are in the file, so a card failure loses no data.
//!
//! Parts: [`nbd`] (the protocol), [`volume`] (sectors in a file), [`cipher`] (the choice between card and CPU, and
//! AES-XTS on the CPU), [`card`] (AES-XTS on the card), [`kernel`] (source of the kernels for sm_20 and PTX),
//! [`tables`] (AES tables and round keys), [`key`] (the key file).
//!
//! Not supported: TLS, multiple exports, sector integrity, key rotation.

pub mod card;
pub mod cipher;
pub mod kernel;
pub mod key;
pub mod nbd;
pub mod tables;
pub mod volume;

/// Sector size in bytes, which is the unit of encryption. A sector's number is its tweak, as in dm-crypt's `plain64`.
pub const SECTOR_BYTES: usize = 512;
