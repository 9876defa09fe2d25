//! Sizes as people write and read them: `64K`, `1.5 GiB`.
//!
//! Units are binary throughout (1 K = 1 KiB = 1024 bytes), because block sizes and cache sizes
//! are powers of two; decimal units (`KB`, `GB`) mean two things to two people and are refused.

use hearth_fault::Fault;
use thiserror::Error;

/// A size that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}", self.fault())]
pub enum SizeError {
    /// Not a number with an optional unit.
    Malformed(String),
    /// A decimal unit.
    Ambiguous(String, &'static str),
    /// More than 2^63 bytes.
    TooLarge(String),
}

impl SizeError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            SizeError::Malformed(text) => Fault::new(
                format!("“{text}” is not a size"),
                "write a number with an optional unit, such as 4K, 512M or 1.5G",
            ),
            SizeError::Ambiguous(text, unit) => Fault::new(
                format!("“{text}” has a unit that is ambiguous"),
                format!("write {unit} for the binary unit"),
            ),
            SizeError::TooLarge(text) => Fault::new(
                format!("“{text}” is larger than any device"),
                "give a smaller one",
            ),
        }
    }
}

/// Bytes in `text`: a number, optionally with a fraction, optionally with a unit
/// (`B`, `K`/`KiB`, `M`/`MiB`, `G`/`GiB`, `T`/`TiB`, any case).
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.to_owned());
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0u32,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "kb" => return Err(SizeError::Ambiguous(text.to_owned(), "K or KiB")),
        "mb" => return Err(SizeError::Ambiguous(text.to_owned(), "M or MiB")),
        "gb" => return Err(SizeError::Ambiguous(text.to_owned(), "G or GiB")),
        "tb" => return Err(SizeError::Ambiguous(text.to_owned(), "T or TiB")),
        _ => return Err(malformed()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || number.ends_with('.') || fraction.contains('.') || fraction.len() > 9 {
        return Err(malformed());
    }
    let too_large = || SizeError::TooLarge(text.to_owned());
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let mut bytes = u128::from(whole) << shift;
    if !fraction.is_empty() {
        if shift == 0 {
            return Err(malformed());
        }
        let digits: u128 = fraction.parse().map_err(|_| malformed())?;
        bytes += (digits << shift) / 10u128.pow(fraction.len() as u32);
    }
    match u64::try_from(bytes) {
        Ok(n) if n <= i64::MAX as u64 => Ok(n),
        _ => Err(too_large()),
    }
}

/// `bytes` for a person: at most three significant digits and a binary unit.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value >= 99.95 || value.fract() == 0.0 {
        0
    } else {
        1
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4096B", 4096),
            ("4k", 4096),
            ("4 KiB", 4096),
            ("1.5G", 3 << 29),
            ("0.25M", 1 << 18),
            ("2T", 2 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_refused() {
        for text in [
            "", "K", "-1", "4X", "1..5G", "1.5.2G", ".5G", "1.G", "1.5", "4 K K", "1e3",
        ] {
            assert!(
                matches!(parse(text), Err(SizeError::Malformed(_))),
                "{text}: {:?}",
                parse(text)
            );
        }
        assert!(matches!(parse("4kB"), Err(SizeError::Ambiguous(..))));
        assert!(matches!(parse("99999999T"), Err(SizeError::TooLarge(_))));
        assert!(matches!(
            parse("99999999999999999999999"),
            Err(SizeError::TooLarge(_))
        ));
    }

    #[test]
    fn sizes_shown() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (1536, "1.5 KiB"),
            (1 << 30, "1 GiB"),
            (1_000_000, "977 KiB"),
            (1023 << 20, "1.0 GiB"),
            (150 << 30, "150 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
