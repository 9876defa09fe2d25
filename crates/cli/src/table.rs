//! Aligned columns for the terminal.

/// Rows under headings; columns are as wide as their widest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with these headings; a heading that begins with `>` aligns its column to the right.
    pub fn new(headings: &[&str]) -> Table {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        Table {
            rows: vec![
                headings
                    .iter()
                    .map(|h| h.trim_start_matches('>').to_owned())
                    .collect(),
            ],
            right,
        }
    }

    /// Adds a row.
    pub fn row<I: IntoIterator<Item = String>>(&mut self, cells: I) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The table as text, each line ended.
    pub fn render(&self) -> String {
        let columns = self.right.len();
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|r| r.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
                if *right {
                    line.push_str(&pad);
                    line.push_str(cell);
                } else {
                    line.push_str(cell);
                    line.push_str(&pad);
                }
                line.push_str("  ");
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// `text` with control characters replaced: names and paths come from elsewhere and must not
/// steer the terminal.
pub fn plain(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{FFFD}' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut t = Table::new(&["NAME", ">SIZE"]);
        t.row(["a".to_owned(), "1 GiB".to_owned()]);
        t.row(["größer".to_owned(), "512 B".to_owned()]);
        assert_eq!(t.render(), "NAME     SIZE\na       1 GiB\ngrößer  512 B\n");
    }

    #[test]
    fn terminals_are_not_steered() {
        assert_eq!(plain("a\u{1b}[2Jb"), "a\u{FFFD}[2Jb");
    }
}
