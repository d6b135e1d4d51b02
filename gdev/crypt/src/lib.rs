//! An encrypted block device: a server of the NBD protocol that encrypts sectors with AES-256-XTS before it writes them
//! to a file.
//!
//! The program is an example of a host service that uses its own card (Gdev's figures 8 to 10). The card encrypts large
//! requests if it is faster than the CPU, and the CPU takes over if the card fails. A write is acknowledged when the
//! encrypted sectors are in the file, so a failed card loses nothing.
//!
//! Parts: [`nbd`] (the protocol), [`volume`] (sectors in a file), [`cipher`] (the choice between card and CPU, and
//! the CPU), [`card`] (AES-XTS on the card), [`kernel`] (its kernels, as text for sm_20 and PTX), [`tables`] (AES
//! tables and round keys), [`key`] (the key file).
//!
//! Not supported: TLS, several exports, integrity of sectors, changes of the key.

pub mod card;
pub mod cipher;
pub mod kernel;
pub mod key;
pub mod nbd;
pub mod tables;
pub mod volume;

/// Size of a sector in bytes: the unit of encryption. The number of a sector is its tweak, as in dm-crypt's `plain64`.
pub const SECTOR_BYTES: usize = 512;
