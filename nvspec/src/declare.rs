//! The register declaration macro and the types of its tables.

/// Bits `hi..=lo` of a 32-bit register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Highest bit.
    pub hi: u32,
    /// Lowest bit.
    pub lo: u32,
}

impl Field {
    /// Creates the field with bits `hi:lo`, as in the manuals.
    #[must_use]
    pub const fn new(hi: u32, lo: u32) -> Self {
        assert!(hi < 32 && lo <= hi, "field bits must be in descending order within 31:0");
        Self { hi, lo }
    }

    /// Returns a mask of the field's bits.
    #[must_use]
    pub const fn mask(self) -> u32 {
        (u32::MAX >> (31 - (self.hi - self.lo))) << self.lo
    }

    /// Extracts the field's value from a register value.
    #[must_use]
    pub const fn get(self, register: u32) -> u32 {
        (register & self.mask()) >> self.lo
    }

    /// Returns true if any bit of the field is set.
    #[must_use]
    pub const fn is_set(self, register: u32) -> bool {
        register & self.mask() != 0
    }

    /// Returns `register` with the field replaced by the low bits of `value`.
    #[must_use]
    pub const fn with(self, register: u32, value: u32) -> u32 {
        (register & !self.mask()) | ((value << self.lo) & self.mask())
    }

    /// Returns a register value with the low bits of `value` in this field and zeros elsewhere.
    #[must_use]
    pub const fn encode(self, value: u32) -> u32 {
        self.with(0, value)
    }
}

/// CPU access mode of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Writes are stored, and reads return the stored value.
    Rw,
    /// Writes are ignored.
    Ro,
    /// Reads return 0.
    Wo,
    /// Writing a one clears the bit.
    W1c,
}

/// A named field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedField {
    /// Name in the manuals.
    pub name: &'static str,
    /// The field's bits.
    pub field: Field,
}

/// A register or an array of registers.
#[derive(Clone, Copy, Debug)]
pub struct RegInfo {
    /// Name in the manuals.
    pub name: &'static str,
    /// BAR0 byte offset of the register, or of the first element of an array.
    pub offset: u32,
    /// Number of elements.
    pub count: u32,
    /// Distance between elements in bytes.
    pub stride: u32,
    /// CPU access mode.
    pub access: Access,
    /// Reset value.
    pub reset: u32,
    /// The register's fields, most significant first.
    pub fields: &'static [NamedField],
}

/// Maps each dword of a block to its register: 0 for no register, or the register's table index plus one. Fails to
/// compile if two registers have the same offset.
pub(crate) const fn dense_map<const N: usize>(base: u32, info: &[RegInfo]) -> [u16; N] {
    let mut map = [0u16; N];
    let mut which = 0;
    while which < info.len() {
        let reg = &info[which];
        let mut index = 0;
        while index < reg.count {
            let offset = reg.offset + index * reg.stride;
            assert!(
                offset >= base && offset.is_multiple_of(4),
                "register before the start of its block, or misaligned"
            );
            let cell = ((offset - base) / 4) as usize;
            assert!(cell < N, "register beyond the end of its block");
            assert!(map[cell] == 0, "two registers at the same offset");
            map[cell] = which as u16 + 1;
            index += 1;
        }
        which += 1;
    }
    map
}

/// Declares register blocks with absolute BAR0 offsets. Creates a module per block with `BASE`, `END`, `Reg`, `INFO`
/// and `decode`, and a module per register with `OFFSET`, its fields, and `at(index)` for arrays.
macro_rules! regs {
    ($(
        $(#[$block_doc:meta])*
        mod $block:ident @ $base:literal .. $end:literal {
            $(
                $(#[$doc:meta])*
                $name:ident $([$count:literal; $stride:literal])? @ $offset:literal $access:ident $(= $reset:literal)? {
                    $( $(#[$field_doc:meta])* $hi:literal : $lo:literal $field:ident; )*
                }
            )*
        }
    )*) => {$(
        $(#[$block_doc])*
        pub mod $block {
            #[allow(unused_imports, reason = "a block may lack registers with fields")]
            use crate::declare::{Access, Field, NamedField, RegInfo, dense_map};

            /// BAR0 byte offset of the block.
            pub const BASE: u32 = $base;
            /// BAR0 byte offset just past the block.
            pub const END: u32 = $end;
            /// BAR0 byte offset of the block's last byte.
            pub const LAST: u32 = $end - 1;

            /// The block's registers.
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            #[allow(non_camel_case_types, reason = "names are as in the manuals")]
            pub enum Reg { $( $(#[$doc])* $name, )* }

            const ALL: &[Reg] = &[$( Reg::$name ),*];

            /// The block's registers in declaration order.
            pub static INFO: &[RegInfo] = INFO_CONST;
            const INFO_CONST: &[RegInfo] = &[$( RegInfo {
                name: stringify!($name),
                offset: $offset,
                count: regs!(@or $($count)?; 1),
                stride: regs!(@or $($stride)?; 4),
                access: Access::$access,
                reset: regs!(@or $($reset)?; 0),
                fields: &[$( NamedField { name: stringify!($field), field: Field::new($hi, $lo) } ),*],
            } ),*];

            static MAP: [u16; (($end - $base) / 4) as usize] = dense_map($base, INFO_CONST);

            /// Returns the register at BAR0 byte `offset`, and its array index.
            #[must_use]
            pub fn decode(offset: u32) -> Option<(Reg, u32)> {
                let cell = *MAP.get((offset.checked_sub(BASE)? / 4) as usize)?;
                let which = usize::from(cell.checked_sub(1)?);
                let info = &INFO_CONST[which];
                Some((ALL[which], (offset - info.offset) / info.stride))
            }

            impl Reg {
                /// Returns the name, offset, access mode, reset value and fields.
                #[must_use]
                pub fn info(self) -> &'static RegInfo { &INFO[self as usize] }
            }

            $(
                $(#[$doc])*
                #[allow(non_snake_case, reason = "names are as in the manuals")]
                pub mod $name {
                    #[allow(unused_imports, reason = "not every register has fields")]
                    use crate::declare::Field;
                    /// BAR0 byte offset of the register, or of the first element of an array.
                    pub const OFFSET: u32 = $offset;
                    $(
                        /// Number of elements.
                        pub const COUNT: u32 = $count;
                        /// Returns the BAR0 byte offset of the register at `index`, which must be less than `COUNT`.
                        #[must_use]
                        pub const fn at(index: u32) -> u32 { $offset + index * $stride }
                    )?
                    $(
                        #[doc = concat!("Bits ", stringify!($hi), ":", stringify!($lo), ".")]
                        $(#[$field_doc])*
                        pub const $field: Field = Field::new($hi, $lo);
                    )*
                }
            )*
        }
    )*

        /// All blocks, each with its name, start offset, end offset (exclusive) and registers.
        pub static BLOCKS: &[(&str, u32, u32, &[crate::RegInfo])] =
            &[$( (stringify!($block), $base, $end, $block::INFO) ),*];
    };
    (@or $value:literal; $default:literal) => { $value };
    (@or ; $default:literal) => { $default };
}
