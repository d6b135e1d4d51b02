//! Cubins, which are ELF files with kernels for sm_20, as produced by NVIDIA's compilers up to CUDA 8.
//!
//! Sources: the ELF files themselves, as printed by `cuobjdump` and `readelf`, and the loader of the published Gdev. A
//! kernel has these sections: `.text.NAME` (the number of registers is in bits 31:24 of `sh_info`, the number of
//! barriers in bits 26:20 of `sh_flags`), `.nv.info.NAME` with attributes, and `.nv.shared.NAME` and `.nv.local.NAME`
//! (only their sizes are used).
//!
//! A cubin is rejected if it contains anything that a [`Program`] cannot represent: constants of its own, global
//! variables, or relocations.

use object::elf::{FileHeader32, FileHeader64, SHT_REL, SHT_RELA};
use object::read::elf::{FileHeader, SectionHeader, SectionTable};
use object::{Endianness, FileKind};

use crate::{Kernel, Parameter, Program};

/// Value of `e_machine` for NVIDIA CUDA.
const EM_CUDA: u16 = 190;
/// `e_flags` bits with the architecture number.
const FLAGS_SM: u32 = 0xff;
/// Supported architectures.
const ARCHITECTURES: [u32; 2] = [20, 21];
/// Offset of the parameters in constant bank 0.
const PARAMETERS_OFFSET: u16 = 0x20;
/// Maximum number of kernels in a cubin.
const MAX_KERNELS: usize = 4096;
/// Attribute with the symbol, and the offset and size of the parameters in constant bank 0.
const PARAM_CBANK: u8 = 0x0a;
/// Attribute of one parameter: the symbol, the parameter's number and offset, and flags with the size in bits 31:18.
const KPARAM_INFO: u8 = 0x17;
/// Format of an attribute with a two-byte value.
const FORMAT_HALF: u8 = 0x03;
/// Format of an attribute that includes the size of its value in bytes.
const FORMAT_SIZED: u8 = 0x04;
/// Attribute with the size of the parameters in bytes.
const CBANK_PARAM_SIZE: u8 = 0x19;

/// Returns true if `data` is an ELF file.
pub fn is_elf(data: &[u8]) -> bool {
    data.starts_with(b"\x7fELF")
}

/// Returns the length of a cubin in bytes, based on its first 64 bytes. The length is the end of the last table,
/// because compilers write the tables after all sections.
pub fn length(header: &[u8]) -> Option<usize> {
    match FileKind::parse(header).ok()? {
        FileKind::Elf32 => tables_end::<FileHeader32<Endianness>>(header),
        FileKind::Elf64 => tables_end::<FileHeader64<Endianness>>(header),
        _ => None,
    }
}

fn tables_end<E: FileHeader<Endian = Endianness>>(header: &[u8]) -> Option<usize> {
    let file = E::parse(header).ok()?;
    let endian = file.endian().ok()?;
    let end = |start: u64, size: u16, count: u16| start.checked_add(u64::from(size).checked_mul(count.into())?);
    let sections = end(file.e_shoff(endian).into(), file.e_shentsize(endian), file.e_shnum(endian))?;
    let segments = end(file.e_phoff(endian).into(), file.e_phentsize(endian), file.e_phnum(endian))?;
    usize::try_from(sections.max(segments)).ok()
}

/// Reads a cubin.
///
/// # Errors
/// Returns an error if the file is corrupt, is for a different architecture, or contains anything that a [`Program`]
/// cannot represent.
pub fn read(data: &[u8]) -> Result<Program, String> {
    match FileKind::parse(data).map_err(|error| format!("not a cubin: {error}"))? {
        FileKind::Elf32 => read_class::<FileHeader32<Endianness>>(data),
        FileKind::Elf64 => read_class::<FileHeader64<Endianness>>(data),
        other => Err(format!("not a cubin but {other:?}")),
    }
}

fn read_class<E: FileHeader<Endian = Endianness>>(data: &[u8]) -> Result<Program, String> {
    let damaged = |error: object::Error| format!("the cubin is corrupt: {error}");
    let header = E::parse(data).map_err(damaged)?;
    let endian = header.endian().map_err(damaged)?;
    if header.e_machine(endian) != EM_CUDA {
        return Err(format!("an ELF file for machine {}, not a cubin ({EM_CUDA})", header.e_machine(endian)));
    }
    let architecture = header.e_flags(endian) & FLAGS_SM;
    if !ARCHITECTURES.contains(&architecture) {
        return Err(format!("the cubin is for sm_{architecture}, not sm_20; compile with -arch=sm_20"));
    }
    let sections = header.sections(endian, data).map_err(damaged)?;
    let file = Cubin { data, endian, sections };
    file.refuse_unsupported()?;
    let mut code = Vec::new();
    let mut kernels = Vec::new();
    for section in file.sections.iter() {
        let Some(name) = file.name(section)?.strip_prefix(".text.") else { continue };
        if kernels.len() == MAX_KERNELS {
            return Err(format!("the cubin has more than {MAX_KERNELS} kernels"));
        }
        let text = section.data(endian, data).map_err(damaged)?;
        let too_long = |_| format!("kernel {name:?} is too long");
        let entry_offset = u32::try_from(code.len()).map_err(too_long)?;
        let flags: u64 = section.sh_flags(endian).into();
        let (params, parameters) = file.parameters(name)?;
        kernels.push(Kernel {
            name: name.to_owned(),
            entry_offset,
            size: u32::try_from(text.len()).map_err(too_long)?,
            registers: section.sh_info(endian) >> 24,
            shared_bytes: file.size(&format!(".nv.shared.{name}"))?,
            local_bytes: file.size(&format!(".nv.local.{name}"))?,
            barriers: (flags >> 20 & 0x7f) as u32,
            params,
            parameters,
        });
        code.extend_from_slice(text);
    }
    if kernels.is_empty() {
        return Err("the cubin has no kernel".into());
    }
    Program::from_raw(&code, kernels)
}

struct Cubin<'a, E: FileHeader> {
    data: &'a [u8],
    endian: Endianness,
    sections: SectionTable<'a, E>,
}

impl<'a, E: FileHeader<Endian = Endianness>> Cubin<'a, E> {
    fn name(&self, section: &E::SectionHeader) -> Result<&'a str, String> {
        let name = self.sections.section_name(self.endian, section);
        let name = name.map_err(|error| format!("the cubin is corrupt: {error}"))?;
        std::str::from_utf8(name).map_err(|_| "a section's name is not UTF-8".to_owned())
    }

    fn refuse_unsupported(&self) -> Result<(), String> {
        for section in self.sections.iter() {
            let name = self.name(section)?;
            let kind = section.sh_type(self.endian);
            let is_empty = section.sh_size(self.endian).into() == 0;
            let constants = name.starts_with(".nv.constant") && !name.starts_with(".nv.constant0");
            if (kind == SHT_REL || kind == SHT_RELA) && !is_empty && name.contains(".text.") {
                return Err(format!("the cubin needs relocations ({name}): calls and global variables"));
            }
            if constants && !is_empty {
                return Err(format!("the cubin has its own constants ({name})"));
            }
            if name.starts_with(".nv.global") && !is_empty {
                return Err(format!("the cubin has global variables ({name})"));
            }
        }
        Ok(())
    }

    /// Returns the size of a section, or 0 if it does not exist.
    fn size(&self, name: &str) -> Result<u32, String> {
        let Some((_, section)) = self.sections.section_by_name(self.endian, name.as_bytes()) else { return Ok(0) };
        let bytes: u64 = section.sh_size(self.endian).into();
        u32::try_from(bytes).map_err(|_| format!("section {name} has {bytes} bytes"))
    }

    /// Returns the size of a kernel's parameters in bytes, and the list of parameters.
    fn parameters(&self, kernel: &str) -> Result<(u32, Vec<Parameter>), String> {
        let name = format!(".nv.info.{kernel}");
        let Some((_, section)) = self.sections.section_by_name(self.endian, name.as_bytes()) else {
            return Ok((0, Vec::new()));
        };
        let mut rest = section.data(self.endian, self.data).map_err(|error| format!("{name}: {error}"))?;
        let (mut bytes, mut list) = (0, Vec::new());
        while let [format, attribute, low, high, tail @ ..] = rest {
            let half = u16::from_le_bytes([*low, *high]);
            let length = if *format == FORMAT_SIZED { usize::from(half) } else { 0 };
            let value = tail.get(..length).ok_or_else(|| format!("{name} is truncated"))?;
            match (*format, *attribute, value) {
                (FORMAT_HALF, CBANK_PARAM_SIZE, _) => bytes = u32::from(half),
                (FORMAT_SIZED, PARAM_CBANK, [_, _, _, _, offset_low, offset_high, size_low, size_high, ..]) => {
                    let offset = u16::from_le_bytes([*offset_low, *offset_high]);
                    if offset != PARAMETERS_OFFSET {
                        return Err(format!("kernel {kernel:?} has its parameters at {offset:#x}, not 0x20"));
                    }
                    bytes = u32::from(u16::from_le_bytes([*size_low, *size_high]));
                }
                (FORMAT_SIZED, KPARAM_INFO, [_, _, _, _, _, _, low, high, flags @ ..]) => {
                    let flags: [u8; 4] = flags.try_into().map_err(|_| format!("{name} is corrupt"))?;
                    let offset = u16::from_le_bytes([*low, *high]).into();
                    list.push(Parameter { offset, bytes: u32::from_le_bytes(flags) >> 18 });
                }
                _ => {}
            }
            rest = tail.get(length..).unwrap_or_default();
        }
        list.sort_unstable_by_key(|parameter| parameter.offset);
        Ok((bytes, list))
    }
}
