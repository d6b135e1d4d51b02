//! Loads firmware into falcons.

use crate::CardError;
use card::Card;
use firmware::{Image, Set};
use nvspec::falcon::{CODE_PAGE_BYTES, CODE_PAGE_WORDS, Falcon};
use nvspec::regs::fecs::{self, DMEM_CONTROL, HWCFG, IMEM_CONTROL};

/// Returns the offset of the falcon's register that corresponds to FECS's `register`.
fn at(falcon: Falcon, register: u32) -> u32 {
    falcon.base() + (register - fecs::BASE)
}

/// Loads an image into a falcon's memories. The code is written page by page, each page with its tag. The falcon must
/// be stopped.
///
/// # Errors
/// Returns an error if the image is too large for the falcon's code memory.
pub fn load(card: &dyn Card, set: &Set, falcon: Falcon) -> Result<(), CardError> {
    let image: &Image = set.image(falcon);
    let room = HWCFG::IMEM_BLOCKS.get(card.read32(at(falcon, HWCFG::OFFSET)));
    let pages = image.code().len().div_ceil(CODE_PAGE_WORDS) as u32;
    if pages > room {
        return Err(CardError::Firmware { falcon, bytes: pages * CODE_PAGE_BYTES, room: room * CODE_PAGE_BYTES });
    }
    card.write32(at(falcon, DMEM_CONTROL::OFFSET), DMEM_CONTROL::WRITE_INCREMENT.mask());
    for word in image.data() {
        card.write32(at(falcon, fecs::DMEM_DATA::OFFSET), *word);
    }
    card.write32(at(falcon, IMEM_CONTROL::OFFSET), IMEM_CONTROL::WRITE_INCREMENT.mask());
    for (page, tag) in image.code().chunks(CODE_PAGE_WORDS).zip(0u32..) {
        card.write32(at(falcon, fecs::IMEM_TAG::OFFSET), tag);
        // A page is valid only if it is written completely.
        for word in page.iter().copied().chain(std::iter::repeat(0)).take(CODE_PAGE_WORDS) {
            card.write32(at(falcon, fecs::IMEM_DATA::OFFSET), word);
        }
    }
    Ok(())
}
